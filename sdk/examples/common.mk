# What the examples share: where the generated clients are, where builds go, and the request to run.
SDK := $(abspath ../../../build/sdk)
OUT := $(SDK)/examples/$(notdir $(CURDIR))
TARGET ?= 127.0.0.1:50051
PROMPT ?= Once upon a time
override PROMPT := $(value PROMPT)
export TARGET PROMPT
.DEFAULT_GOAL := build
.PHONY: build run
