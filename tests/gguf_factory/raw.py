class RawGguf:
    pass
