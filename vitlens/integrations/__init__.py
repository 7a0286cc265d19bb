"""Callbacks for other libraries, one file each, imported only when named."""
