// Stream one answer: generate HOST:PORT PROMPT
#include <chrono>
#include <iostream>
#include <sstream>

#include <grpcpp/grpcpp.h>

#include "pdserve/v1/inference.grpc.pb.h"

// Asked to come back, gRPC does so by itself, after the time that the refusal names.
constexpr char kRetry[] = R"({"methodConfig": [{"name": [{"service": "pdserve.v1.InferenceService"}], "retryPolicy": {
    "maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]}}]})";

int main(int argc, char** argv) {
  if (argc != 3) return std::cerr << "usage: generate HOST:PORT PROMPT\n", 2;
  grpc::ChannelArguments options;
  options.SetServiceConfigJSON(kRetry);
  auto stub = pdserve::v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(argv[1], grpc::InsecureChannelCredentials(), options));
  pdserve::v1::GenerateRequest request;
  request.set_text(argv[2]);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(32);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  auto stream = stub->Generate(&context, request);
  std::ostringstream tokens;
  for (pdserve::v1::GenerateResponse response; stream->Read(&response);) {
    std::cout << response.output().text() << std::flush;
    for (const auto& token : response.output().tokens()) tokens << ' ' << token.id();
  }
  auto status = stream->Finish();
  if (!status.ok()) return std::cerr << status.error_message() << '\n', 1;
  std::cout << "\ntokens:" << tokens.str() << '\n';
}
