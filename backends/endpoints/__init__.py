"""Other endpoints than those of texts out of completions and chats, of whatever server answers there: a file each."""
