"""Measurements that no command of the product makes: see main.py."""
