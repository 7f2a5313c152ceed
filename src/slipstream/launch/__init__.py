"""Starting processes, watching them, and telling how they ended.

    plan.py        configuration and target in, plan out: pure           start.py       carries a plan out: here, or for a function
    slurm.py       what `srun` already knows of machines and ranks       elastic.py     our verbs for torch's elastic agent
    target.py      running a script as the interpreter would             rendezvous.py  how launchers meet; foreign.py: torch's backends
    worker.py      the life of a worker that runs Python                 store.py       opening the store where processes meet
    processes.py   children: started, noticed, stopped                   signals.py     signals to the launcher, as something to look at
    logs.py        where output goes                                     system.py      what we ask of the operating system
    report.py      which failure came first, and what the user reads     contract.py    what launcher and workers have agreed on

Nothing here imports torch before a plan is carried out.
"""
