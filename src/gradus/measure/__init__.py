"""Measuring: operations, memory, and where a step spends both."""
