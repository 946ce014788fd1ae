"""Prints the requirements of setup.py as the oldest versions that they admit: NAME==VERSION for each NAME>=VERSION."""

import ast
from pathlib import Path

tree = ast.parse((Path(__file__).parents[1] / "setup.py").read_text(encoding="utf-8"))
call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup")
needed = next(keyword.value for keyword in call.keywords if keyword.arg == "install_requires")
print(*(requirement.split(",")[0].replace(">=", "==") for requirement in ast.literal_eval(needed)))
