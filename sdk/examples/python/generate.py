"""Stream one answer: generate.py HOST:PORT PROMPT. (pdserve.client does more; this is what any gRPC client can do.)"""

import sys

import grpc

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub

# Asked to come back, gRPC does so by itself, after the time that the refusal names.
RETRY = """{"methodConfig": [{"name": [{"service": "pdserve.v1.InferenceService"}], "retryPolicy": {
    "maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]}}]}"""

target, prompt = sys.argv[1:]
request = pb.GenerateRequest(
    text=prompt, sampling=pb.SamplingOptions(temperature=0), stopping=pb.StoppingOptions(max_tokens=32)
)
tokens: list[int] = []
with grpc.insecure_channel(target, [("grpc.service_config", RETRY)]) as channel:
    for response in InferenceServiceStub(channel).Generate(request, timeout=120):
        print(response.output.text, end="", flush=True)
        tokens += [token.id for token in response.output.tokens]
print("\ntokens:", *tokens)
