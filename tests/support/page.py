"""Pages as a browser would read them."""

from html.parser import HTMLParser

VOID = {"meta", "img", "source", "br", "link", "input"}


class Page(HTMLParser):
    """A page as a browser would read it: elements with their attributes, and the text of each kind of element."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((tuple(self._open), data))

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag):
        return " ".join(data for path, data in self.texts if tag in path)

    def within(self, tag):
        """The texts that stand in elements of this kind and in no deeper one."""
        return [data for path, data in self.texts if path[-1:] == (tag,)]
