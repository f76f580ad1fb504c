"""How a task spends its time. Begin reading with `time_account.py`."""
