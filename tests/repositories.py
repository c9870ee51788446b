"""A git repository with a sweep and a plugin whose times and errors a test can change; see the fixture `repository`."""

from glabench.apart import ask_git

SWEEP = """
title = "waiting"
[axes]
seqlen = "16"
batch = 1
heads = 1
head_dim = 16
dtype = "fp32"
pass = "fwd"
[[backends]]
name = "steady"
"""
MEASURING = ["--sweep", "waiting.toml", "--plugin", "steady.py", "--device", "cpu"]
COMPARE = ["compare", "--rev", "WORKTREE", *MEASURING, "--rounds", "2"]
CHECK = ["check", "--rev", "main", *MEASURING]


def git(folder, *arguments):
    """What git prints in a folder. Commits have a made-up author."""
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return ask_git(folder, *identity, *arguments)


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def change(folder, name, value):
    """Changes a value that the plugin says from now on, and commits nothing."""
    file = folder / "steady.py"
    before = {"ms": "4.0", "error": "0.001", "first_call_s": "0.1"}[name]
    text = file.read_text()
    assert f'"{name}": {before}' in text
    file.write_text(text.replace(f'"{name}": {before}', f'"{name}": {value}'))


def run_names(folder):
    return sorted(path.name for path in folder.iterdir())
