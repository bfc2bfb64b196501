"""Discrete-event simulation of a fleet under a virtual clock, driven by the policies that the router runs."""
