"""The wire of each server that is emulated, written from its documentation and never from the client's codecs."""
