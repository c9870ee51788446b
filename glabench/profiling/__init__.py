"""Where the time of one call goes: every kernel (or torch's operators on a CPU), gaps between them, the host's side.

`worker` runs the call under torch's profiler in a process of its own; `trace` reads what that has recorded, `profile`
makes a profile of it, and `request` starts the process.
"""
