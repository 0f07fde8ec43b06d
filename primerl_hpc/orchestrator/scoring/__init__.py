"""Turns finished groups into training samples. Pure.

Reading order: scoring → filters → gates.
"""
