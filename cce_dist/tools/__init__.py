"""The commands of ``cce-dist``. The library does not import them."""
