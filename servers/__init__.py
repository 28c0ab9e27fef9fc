"""The embedded server: the wire of vLLM, OpenAI, TGI and LightLLM with no model behind it.

Nothing of `backends` or of loadgen's codecs may be imported here: the server is written from the documentation of those
it stands for, so that an error cannot be made on both sides and cancel out.
"""
