"""The engines: which of them are published, which policy version each serves, and how loaded they are.

Reading order: admin_client → fleet → delivery → broadcast_groups → weight_watcher → turns → load_monitor.
"""
