HOSTILE = {}


def hostile():
    pass
