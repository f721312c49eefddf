"""The commands of ``cce-dist``: nothing outside this folder imports them."""
