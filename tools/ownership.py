"""Find assignments to attributes of other modules' objects: ``python -m tools.ownership``.

An object's attributes are assigned in the module of its class, and nowhere else: elsewhere a method
is called. The class of an object follows from annotations and constructors. Where it does not, the
assignment counts if a class of another module has such an attribute, and none here or in torch has.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.Lambda


class Module:
    """The classes of a file, and the attributes that each defines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        classes = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        self.classes = {node.name: node for node in classes}
        self.attributes = {name for node in classes for name in attributes_of(node)}

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that hold a node, the nearest first."""
        found = self.parents.get(node)
        while found is not None:
            yield found
            found = self.parents.get(found)


def attributes_of(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that a class declares or assigns to itself."""
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield from [child.attr] if is_self(child.value) else []


def is_self(node: ast.AST) -> bool:
    """Return whether an expression is the object of the method that it is in."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


class Code:
    """All modules of a package, and what is known about the classes of their expressions."""

    def __init__(self, package: Path) -> None:
        self.modules = [Module(path) for path in sorted(package.rglob("*.py"))]
        self.home = {name: module for module in self.modules for name in module.classes}
        self._kinds: dict[tuple[str, str], str | None] = {}
        self.returned = {
            node.name: named(node.returns)
            for module in self.modules
            for node in module.tree.body
            if isinstance(node, ast.FunctionDef)
        }

    def foreign(self) -> Iterator[str]:
        """Yield every assignment to an attribute of an object of another module's class."""
        of_torch = {*dir(torch.Tensor), *dir(torch.nn.Module()), *dir(torch.optim.Optimizer)}
        for module in self.modules:
            others = {a for m in self.modules if m is not module for a in m.attributes}
            elsewhere = others - of_torch
            for node in ast.walk(module.tree):
                for base, attr in assigned(node):
                    kind = self.kind(module, base)
                    home = module if kind in module.classes else self.home.get(kind or "")
                    is_here = module is home if home else attr in module.attributes
                    is_ours = home is not None or (kind is None and attr in elsewhere)
                    if is_ours and not is_here and not is_self(base):
                        place = f"{module.path}:{base.lineno}"
                        yield f"{place} {ast.unparse(base)}.{attr}"

    def kind(self, module: Module, node: ast.expr) -> str | None:
        """Return the name of the class of an expression; None if it does not show."""
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            is_method = isinstance(node.func, ast.Attribute) and not name[:1].isupper()
            if is_method:
                return self.kind(module, node.func)
            return name if name[:1].isupper() else self.returned.get(name)
        if isinstance(node, ast.IfExp | ast.BoolOp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
            return next(filter(None, [self.kind(module, part) for part in parts]), None)
        if isinstance(node, ast.Attribute):
            owner = self.kind(module, node.value)
            if owner == "Any":
                return owner  # what an object of another library holds is that library's
            home = self.home.get(owner or "")
            return None if home is None else self.declared(home, str(owner), node.attr)
        if not isinstance(node, ast.Name):
            return None
        if node.id in ("self", "cls"):
            holders = (part.name for part in module.around(node) if isinstance(part, ast.ClassDef))
            return next(holders, None)
        functions = [part for part in module.around(node) if isinstance(part, Function)]
        kinds = (self.local(module, function, node.id) for function in functions)
        return next(filter(None, kinds), None)

    def local(self, module: Module, function: Function, name: str) -> str | None:
        """Return the class of a parameter or a local variable."""
        given = function.args
        for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            if parameter.arg == name:
                return named(parameter.annotation)
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and is_named(node.target, name):
                return named(node.annotation)
            if isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    if is_named(target, name) and not has_name(value, name):
                        return self.kind(module, value)
        return None

    def declared(self, home: Module, owner: str, attr: str) -> str | None:
        """Return the class of an attribute of a class of ours, or of what its method returns."""
        if (owner, attr) not in self._kinds:
            self._kinds[owner, attr] = None  # while it is looked for: it may follow from itself
            self._kinds[owner, attr] = self._declared(home, owner, attr)
        return self._kinds[owner, attr]

    def _declared(self, home: Module, owner: str, attr: str) -> str | None:
        for node in ast.walk(home.classes[owner]):
            if isinstance(node, ast.AnnAssign) and is_own(node.target, attr):
                return named(node.annotation)
            if isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    if is_own(target, attr):
                        return self.kind(home, value)
            if isinstance(node, ast.FunctionDef) and node.name == attr:
                return named(node.returns)
        return None


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment with their values."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def is_own(node: ast.AST, attr: str) -> bool:
    """Return whether a target is an attribute of ``self``, or a field of a class."""
    if isinstance(node, ast.Attribute):
        return node.attr == attr and is_self(node.value)
    return is_named(node, attr)


def has_name(node: ast.AST, name: str) -> bool:
    """Return whether a name occurs in an expression."""
    return any(is_named(part, name) for part in ast.walk(node))


def is_named(node: ast.AST, name: str) -> bool:
    """Return whether an expression is this name."""
    return isinstance(node, ast.Name) and node.id == name


def named(annotation: ast.expr | None) -> str | None:
    """Return the class in an annotation, None left out: ``Healer | None`` is a Healer."""
    if annotation is None:
        return None
    names = [part.strip(" \"'") for part in ast.unparse(annotation).split("|")]
    kinds = [name.split(".")[-1] for name in names if name != "None"]
    return kinds[0] if len(kinds) == 1 and kinds[0].isidentifier() else None


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the object and the attribute of each assignment, ``setattr`` included."""
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield from [] if node.attr.startswith("__") else [(node.value, node.attr)]  # Python's own
    if isinstance(node, ast.Call):
        texts = [ast.unparse(part) for part in (node.func, *node.args)]
        if "setattr" in texts:
            at = texts.index("setattr")
            name = node.args[at + 1] if len(node.args) > at + 1 else None
            if isinstance(name, ast.Constant):
                yield node.args[at], str(name.value)


if __name__ == "__main__":
    print(*Code(ROOT / "heal").foreign(), sep="\n")
