"""`python -m servers`."""

from servers.app import main

main()
