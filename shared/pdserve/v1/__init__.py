"""Generated from protos/pdserve/v1 by `make proto`; do not edit."""
