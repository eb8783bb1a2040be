"""Plug-ins, which put tilewise into other packages. Each has a function `register`."""
