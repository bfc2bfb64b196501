"""Stream one answer: generate.py HOST:PORT PROMPT. (pdserve.client does more; this is what any gRPC client can do.)"""

import sys
import time

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub


def generate(stub: InferenceServiceStub, request: pb.GenerateRequest) -> list[int]:
    """Print the text as it comes and return the token ids."""
    tokens: list[int] = []
    for response in stub.Generate(request, timeout=120):
        tokens += [token.id for token in response.output.tokens]
        print(response.output.text, end="", flush=True)
    return tokens


def retry_delay(error: grpc.RpcError) -> float:
    """Seconds after which a full fleet wants to be asked again. Any other error is raised."""
    status, retry = rpc_status.from_call(error), RetryInfo()
    if status is None or not any(detail.Unpack(retry) for detail in status.details):
        raise error
    return retry.retry_delay.ToTimedelta().total_seconds()


target, prompt = sys.argv[1:]
request = pb.GenerateRequest(
    text=prompt, sampling=pb.SamplingOptions(temperature=0), stopping=pb.StoppingOptions(max_tokens=32)
)
with grpc.insecure_channel(target) as channel:
    stub = InferenceServiceStub(channel)
    try:
        tokens = generate(stub, request)
    except grpc.RpcError as error:
        time.sleep(retry_delay(error))
        tokens = generate(stub, request)
print("\ntokens:", *tokens)
