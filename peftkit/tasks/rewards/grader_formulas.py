"""Parse and evaluate grader formulas: numbers, names, + - * / ^, and a few functions."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence

from peftkit.errors import ConfigError

MAX_FORMULA, MAX_DEPTH = 500, 40
"""Characters of a formula, and how deep it is nested."""

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}


def parsed(formula: str, names: Collection[str]) -> ast.expr:
    """Parse a formula to a tree of numbers, names, operators and calls of known functions.

    Raises:
        ConfigError: The formula is invalid, or has names that are not in `names`.
    """
    try:
        tree = ast.parse(formula.replace("^", "**").strip(), mode="eval").body
        _check_formula(tree, names, MAX_DEPTH)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as problem:
        raise ConfigError(
            f"the formula {formula[:120]!r} cannot be computed.",
            found=getattr(problem, "msg", None) or str(problem),
            fix=f"Known are: + - * / ^ ( ), {', '.join([*names, *_FUNCTIONS])}.",
        ) from None
    return tree


def _check_formula(node: ast.expr, names: Collection[str], depth: int) -> None:
    inner: Sequence[ast.expr]
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
        inner = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        inner, name = node.args, node.func.id
        fewest, most = (2, MAX_FORMULA) if name in ("min", "max") else (1, 1)
        if name not in _FUNCTIONS or not fewest <= len(inner) <= most:
            raise ValueError(f"There is no function {name} of {len(inner)} numbers.")
    elif _is_leaf(node, names):
        inner = []
    else:
        raise ValueError(f"{ast.unparse(node)[:80]} is not known.")
    if depth == 0:
        raise ValueError(f"It is nested more than {MAX_DEPTH} deep.")
    for each in inner:
        _check_formula(each, names, depth - 1)


def _is_leaf(node: ast.expr, names: Collection[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(value := node.value, int | float) and math.isfinite(float(value))
    return isinstance(node, ast.Name) and node.id in names


def computed(node: ast.expr, values: Mapping[str, float]) -> float:
    """Return a formula's value.

    Raises:
        ArithmeticError, ValueError: The value is undefined, such as 1 / 0.
    """
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]  # checked before
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](computed(node.left, values), computed(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](computed(node.operand, values))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return float(_FUNCTIONS[node.func.id](*(computed(arg, values) for arg in node.args)))
