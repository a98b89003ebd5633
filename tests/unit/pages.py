"""Pages of HTML as tests read them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "img", "link", "hr", "rect"}


class Page(HTMLParser):
    """Collects elements, and the text of script, style and everything else; checks that elements nest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.raw, self.open = [], "", {"script": "", "style": ""}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]] += data
        else:
            self.text += data
