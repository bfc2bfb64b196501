# Stream one answer: generate.rb HOST:PORT PROMPT
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "grpc"
require "pdserve/v1/inference_services_pb"

include Pdserve::V1

# Prints the text as it comes and returns the token ids.
def generate(stub, request)
  stub.generate(request, deadline: Time.now + 120).flat_map do |response|
    next [] unless response.output

    $stdout.print(response.output.text)
    $stdout.flush
    response.output.tokens.map(&:id)
  end
end

# Seconds after which a full fleet wants to be asked again. Any other error is raised.
def retry_delay(error)
  detail = error.to_rpc_status&.details&.find { |any| any.is(Google::Rpc::RetryInfo) } or raise error
  delay = detail.unpack(Google::Rpc::RetryInfo).retry_delay
  delay.seconds + delay.nanos / 1e9
end

target, prompt = ARGV
stub = InferenceService::Stub.new(target, :this_channel_is_insecure)
request = GenerateRequest.new(
  text: prompt,
  sampling: SamplingOptions.new(temperature: 0),
  stopping: StoppingOptions.new(max_tokens: 32)
)
begin
  tokens = generate(stub, request)
rescue GRPC::ResourceExhausted => e
  sleep retry_delay(e)
  tokens = generate(stub, request)
end
puts "\ntokens: #{tokens.join(' ')}"
