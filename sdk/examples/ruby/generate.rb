# Stream one answer: generate.rb HOST:PORT PROMPT
require "grpc"
require "pdserve/v1/inference_services_pb"

include Pdserve::V1

# Asked to come back, gRPC does so by itself, after the time that the refusal names.
RETRY = <<~JSON
  {"methodConfig": [{"name": [{"service": "pdserve.v1.InferenceService"}], "retryPolicy": {
    "maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
    "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]}}]}
JSON

target, prompt = ARGV
options = { "grpc.service_config" => RETRY }
stub = InferenceService::Stub.new(target, :this_channel_is_insecure, channel_args: options)
request = GenerateRequest.new(
  text: prompt,
  sampling: SamplingOptions.new(temperature: 0),
  stopping: StoppingOptions.new(max_tokens: 32)
)
tokens = stub.generate(request, deadline: Time.now + 120).flat_map do |response|
  next [] unless response.output

  $stdout.print(response.output.text)
  $stdout.flush
  response.output.tokens.map(&:id)
end
puts "\ntokens: #{tokens.join(' ')}"
