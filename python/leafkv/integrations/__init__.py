"""LeafKV inside other libraries: each a package of its own, that is imported by who uses it."""
