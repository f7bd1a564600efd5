"""What plans, proves and measures exchanges nothing of the rooms below: what it needs otherwise is an argument, what it watches an observer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "gradus"
ROOMS = ("plan", "proof", "measure")
GRADUS: dict[tuple[str, str], str] = {}  # (file, what is assigned) → why; three at most
TORCH = {  # PyTorch asks nobody: what a trace must see or pretend there is exchanged while it runs
    ("plan/trace.py", "F.rms_norm"): "a GPU's kernel keeps other tensors",
    ("plan/trace.py", "F.dropout"): "a GPU's mask takes a byte an element",
    ("plan/trace.py", "owner.name"): "what CUDA's autocast computes in fp32 (of F and Tensor); operators that DTensor tries on whole tensors",
    ("plan/trace.py", "torch.UntypedStorage.resize_"): "FSDP2 frees and takes memory by it, past all modes",
    ("plan/trace.py", "torch.get_rng_state"): "checkpointing keeps what it returns, past all modes",
    ("plan/trace.py", "torch.random.get_rng_state"): "likewise",
}


def is_function(value: ast.expr | None, functions: set[str]) -> bool:
    if isinstance(value, ast.IfExp):
        return is_function(value.body, functions) or is_function(value.orelse, functions)
    partial = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "partial"
    return partial or isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def assigned(tree: ast.Module, room: str = "plan") -> Iterator[str]:
    """What a file assigns that is not its own: attributes of what it imports, functions in place of anybody's, hooks on every module there is."""
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import) or (isinstance(n, ast.ImportFrom) and f"gradus.{room}" not in n.module)]
    imported = {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}
    plain = (node for node in ast.walk(tree) if not isinstance(node, ast.ClassDef))
    functions = {child.name for node in plain for child in ast.iter_child_nodes(node) if isinstance(child, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name in ("replaced", "setattr", "delattr", "__setattr__") and ast.unparse(node.args[0]) != "self":
                of, what = node.args[:2]
                yield f"{ast.unparse(of)}.{what.value if isinstance(what, ast.Constant) else ast.unparse(what)}"
            elif name.startswith("register_module_"):
                yield name
            continue
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            continue
        value = getattr(node, "value", None)
        function = any(is_function(v, functions) for v in (value.elts if isinstance(value, ast.Tuple) else [value]))
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        for target in (part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])):
            # `thing.name = ...` and `vars(thing)["name"] = ...`
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            within = ast.unparse(root.args[0]).split(".")[0] if isinstance(root, ast.Call) and root.args else ast.unparse(root)
            is_dict = isinstance(target, ast.Subscript) and ("__dict__" in ast.unparse(target) or ast.unparse(target).startswith("vars("))
            if (isinstance(target, ast.Attribute) or is_dict) and (within in imported or (function and within != "self")):
                yield ast.unparse(target)


def exchanged(src: Path) -> set[tuple[str, str]]:
    files = ((room, file) for room in ROOMS for file in sorted((src / room).rglob("*.py")))
    found = ((file, assigned(ast.parse(file.read_text(encoding="utf-8")), room)) for room, file in files)
    return {(str(file.relative_to(src)), what) for file, names in found for what in names}


def test_no_name_of_another_room_is_assigned():
    assert exchanged(SRC) == set(GRADUS) | set(TORCH)
    assert len(GRADUS) <= 3 and all((GRADUS | TORCH).values())


@pytest.mark.parametrize("line", [
    "setattr(kernels, 'flex', mine)", "kernels.flex = mine", "kernels.flex, x = mine, 1", "del kernels.flex", "vars(kernels)['flex'] = mine",
    "kernels.__dict__['flex'] = mine", "replaced(parallel, 'backward', mine)", "parallel.backward = lambda loss: None", "parallel.backward = mine",
    "module.register_module_forward_hook(mine)", "object.__setattr__(kernels, 'flex', mine)", "kernels.LIMIT += 1", "kernels.LIMIT: int = 1",
])  # fmt: skip
def test_each_way_to_assign_one_is_seen(line):
    start = "from gradus.layers import kernels\ndef mine(): ...\ndef test(parallel, self):\n    self.own = mine\n    parallel.number = 3\n    "
    assert len(list(assigned(ast.parse(start + line)))) == 1
