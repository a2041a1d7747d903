"""Places where a long name in code may break: behind dots, underscores, slashes and parentheses."""

import re

_CODE = re.compile(r'(<span class="pre">)([^<]{12,})(?=</span>)')
_PLACE = re.compile(r"(?<=[\w)\]])([._/(,=]|::)(?=[\w&\[])")


def _break(app, pagename, templatename, context, doctree):
    """Add the element wbr to the code of a page and of its list of sections."""
    for part in ("body", "toc"):
        if context.get(part):
            context[part] = _CODE.sub(_with_breaks, context[part])


def _with_breaks(code):
    short = "" if len(code[2]) > 24 else ' class="narrow"'  # whole on wide screens
    return code[1] + _PLACE.sub(rf"\1<wbr{short}>", code[2])


def setup(app):
    """Add the handler."""
    app.connect("html-page-context", _break)
    return {"parallel_read_safe": True}
