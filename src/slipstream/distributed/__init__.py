"""Processes and how they communicate: cluster detection, the process group, guarded collectives over nested data, and reports of ranks
that wait. A public call goes `state` or `functional` -> `collectives` -> `guard` -> `transport`; `heartbeat` and `wait_monitor` say where
the ranks are while it waits. `guard` and the collectives know no state of the library: a channel and limits are passed in.
"""
