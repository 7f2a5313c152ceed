"""Start processes, watch them, and report how they ended.

Nothing here imports torch before a plan is carried out.

    plan.py            configuration and target in, plan out (pure)   agent.py           carries out a plan under torch's elastic agent
    workers.py         the child processes of this machine            worker.py          one worker, from the fork to the exit
    rendezvous.py      how the launchers of a job meet                store.py           the rendezvous store and its keys
    output.py          where output goes; JSON log lines              warning_dedup.py   the same warning printed once per machine
    failure_report.py  which failure came first, and the report       function_launcher.py  a function instead of a script
    slurm.py           machines and ranks from Slurm
"""
