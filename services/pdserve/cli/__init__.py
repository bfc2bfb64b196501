"""The command line. It imports no torch, and grpc only in the commands that talk to a fleet."""
