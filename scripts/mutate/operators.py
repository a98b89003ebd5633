"""Mutation operators: small changes to a Python source that nobody chose.

Left alone: annotations, decorators, strings, what is logged, `__all__` and `__slots__`, what only type checkers read,
and keywords that change no result of sound code (`strict` of zip, `encoding`).
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

BINARY = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
          ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"),
          ast.BitOr: ("|", "&")}  # fmt: skip
COMPARED = {ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"), ast.Gt: (">", ">=", "<="), ast.GtE: (">=", ">", "<"),
            ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
            ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}  # fmt: skip
"""By operator: how it is written, and what takes its place."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
IGNORED_KEYWORDS = {"strict", "encoding"}
LOGGED = {"print", "log", "logger", "logging", "warnings"}


@dataclass(frozen=True)
class Change:
    """In a function, class or module, `old` becomes `new` where it stands for the `nth` time: from byte `start` on.

    lines: first and last of the statement, or of its head; those of the file where it runs as the module is imported.
    """

    function: str
    old: str
    new: str
    nth: int
    start: int
    line: int
    lines: tuple[int, int]

    def planted(self, source: str) -> str:
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.start + len(self.old.encode()) :]).decode()


def changes(source: str) -> tuple[Change, ...]:
    """All that the operators can do to a source, in its order; each is Python still."""
    found = _Finder(source).found
    return tuple(sorted(found, key=lambda change: (change.start, len(change.old), change.new)))


class _Finder:
    """Walks the tree of one source."""

    def __init__(self, source: str) -> None:
        self._text = source.encode()
        self._line_starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._times: Counter[tuple[str, str, str]] = Counter()
        self.found: list[Change] = []
        self._statements(ast.parse(source).body, "", at_import=True)

    def _statements(self, body: Sequence[ast.stmt], scope: str, at_import: bool) -> None:
        for statement in body:
            if not _is_left_alone(statement):
                self._statement(statement, scope, at_import)

    def _statement(self, statement: ast.stmt, scope: str, at_import: bool) -> None:
        bodies = [(name, value) for name, value in ast.iter_fields(statement) if _holds_statements(value)]
        inner = [s for _, body in bodies for s in body]
        last = min((s.lineno for s in inner), default=_end_line(statement) + 1) - 1
        lines = (1, len(self._line_starts)) if at_import else (statement.lineno, max(statement.lineno, last))
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            scope = f"{scope}.{statement.name}".lstrip(".")
        for start, end, new in self._of_statement(statement):
            self._add(scope, lines, start, end, new)
        for child in _expressions(statement):
            for start, end, new in self._of_expression(child):
                self._add(scope, lines, start, end, new)
        for _, body in bodies:
            if body and isinstance(body[0], ast.ExceptHandler):
                body = [s for handler in body for s in handler.body]
            self._statements(body, scope, at_import and not isinstance(statement, FUNCTIONS))

    def _add(self, scope: str, lines: tuple[int, int], start: int, end: int, new: str) -> None:
        old = self._text[start:end].decode()
        self._times[scope, old, new] += 1
        line = bisect_right(self._line_starts, start)
        self.found.append(Change(scope, old, new, self._times[scope, old, new], start, line, lines))

    def _of_statement(self, statement: ast.stmt) -> Iterator[tuple[int, int, str]]:
        start, end = self._span(statement)
        if isinstance(statement, ast.If):
            yield (*self._span(statement.test), "False")
        elif isinstance(statement, ast.Return):
            if statement.value is not None and not isinstance(statement.value, ast.Constant):
                yield (*self._span(statement.value), "None")
        elif isinstance(statement, (ast.Continue, ast.Break)):
            yield start, end, "break" if isinstance(statement, ast.Continue) else "continue"
        elif isinstance(statement, ast.Raise) or _is_effect(statement):
            yield start, end, "pass"
        if isinstance(statement, ast.AugAssign) and type(statement.op) in BINARY:
            old, new = BINARY[type(statement.op)]
            yield self._swapped(statement, statement.target, statement.value, old + "=", new + "=")

    def _of_expression(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if (
            isinstance(node, ast.BinOp)
            and type(node.op) in BINARY
            and not (_is_text(node.left) or _is_text(node.right))
        ):
            yield self._swapped(node, node.left, node.right, *BINARY[type(node.op)])
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                old, *others = COMPARED[type(operator)]
                for new in others:
                    yield self._swapped(node, left, right, old, new)
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                yield self._swapped(node, left, right, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield (*self._span(node), f"({self._written(node.operand)})")
        elif isinstance(node, ast.IfExp):
            yield (*self._span(node.test), f"(not ({self._written(node.test)}))")
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield (*self._span(test), "True")
        elif isinstance(node, ast.Constant):
            for new in _other_numbers(node.value):
                yield (*self._span(node), new)
        elif isinstance(node, ast.Slice):
            for bound, change in ((node.lower, "+ 1"), (node.upper, "- 1")):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield (*self._span(bound), f"({self._written(bound)}) {change}")
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)

    def _of_call(self, call: ast.Call) -> Iterator[tuple[int, int, str]]:
        if isinstance(call.func, ast.Name) and call.func.id in CALLED:
            yield (*self._span(call.func), CALLED[call.func.id])
        keywords = {keyword.arg for keyword in call.keywords}
        if isinstance(call.func, ast.Name) and call.func.id == "sorted" and "reverse" not in keywords:
            yield (*self._span(call), f"{self._written(call)}[::-1]")
        for keyword in call.keywords:
            if keyword.arg not in (None, *IGNORED_KEYWORDS):
                start, end = self._span(keyword)
                rest = self._text[end:]
                comma = len(rest) - len(rest.lstrip()) + 1 if rest.lstrip().startswith(b",") else 0
                yield start, end + comma, ""

    def _swapped(self, node: ast.AST, left: ast.AST, right: ast.AST, old: str, new: str) -> tuple[int, int, str]:
        """The text of `node` with another operator between two of its operands."""
        start, end = self._span(node)
        before, after = self._span(left)[1], self._span(right)[0]
        between = self._text[before:after].decode().replace(old, new, 1)
        return start, end, self._text[start:before].decode() + between + self._text[after:end].decode()

    def _written(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._line_starts[_end_line(node) - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _end_line(node: ast.AST) -> int:
    return node.end_lineno  # type: ignore[attr-defined,no-any-return]


def _holds_statements(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (ast.stmt, ast.ExceptHandler))


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What is computed at a statement itself, without what is left alone."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or _holds_statements(value):
            continue
        if isinstance(node, ast.ClassDef) and name == "keywords":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg in IGNORED_KEYWORDS:
                continue
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _expressions(child)


def _is_left_alone(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(t, ast.Name) and t.id in ("__all__", "__slots__") for t in targets)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        named = ast.unparse(statement.value.func).split(".")[0]
        return named in LOGGED
    return isinstance(statement, ast.Assert)


def _is_effect(statement: ast.stmt) -> bool:
    """A statement that can go without a name missing: a call, or what is stored in something."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in statement.targets)
    return isinstance(statement, (ast.AugAssign, ast.Delete))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _other_numbers(value: object) -> list[str]:
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, int):
        return [str(value + 1), str(value - 1)]
    if isinstance(value, float):
        return ["1.0"] if value == 0 else [f"({value!r} * 2)"]
    return []
