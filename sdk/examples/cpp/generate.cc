// Stream one answer: generate HOST:PORT PROMPT
#include <chrono>
#include <cstdint>
#include <iostream>
#include <optional>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "pdserve/v1/inference.grpc.pb.h"

namespace pb = pdserve::v1;

// Prints the text as it comes and collects the token ids.
grpc::Status Generate(pb::InferenceService::Stub& stub, const pb::GenerateRequest& request,
                      std::vector<std::uint32_t>& tokens) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  auto stream = stub.Generate(&context, request);
  pb::GenerateResponse response;
  while (stream->Read(&response)) {
    for (const auto& token : response.output().tokens()) tokens.push_back(token.id());
    std::cout << response.output().text() << std::flush;
  }
  return stream->Finish();
}

// How long a full fleet wants not to be asked again; nothing for any other error.
std::optional<std::chrono::nanoseconds> RetryDelay(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::RetryInfo retry;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      return std::chrono::seconds(delay.seconds()) + std::chrono::nanoseconds(delay.nanos());
    }
  }
  return std::nullopt;
}

int main(int argc, char** argv) {
  if (argc != 3) return std::cerr << "usage: generate HOST:PORT PROMPT\n", 2;
  auto stub = pb::InferenceService::NewStub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  pb::GenerateRequest request;
  request.set_text(argv[2]);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(32);
  std::vector<std::uint32_t> tokens;
  auto status = Generate(*stub, request, tokens);
  if (auto delay = RetryDelay(status)) {
    std::this_thread::sleep_for(*delay);
    status = Generate(*stub, request, tokens);
  }
  if (!status.ok()) return std::cerr << status.error_message() << '\n', 1;
  std::cout << "\ntokens:";
  for (auto token : tokens) std::cout << ' ' << token;
  std::cout << '\n';
}
