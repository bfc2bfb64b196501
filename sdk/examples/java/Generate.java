import io.grpc.ManagedChannelBuilder;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.concurrent.TimeUnit;
import pdserve.v1.GenerateRequest;
import pdserve.v1.InferenceServiceGrpc;
import pdserve.v1.SamplingOptions;
import pdserve.v1.StoppingOptions;

/** Streams one answer: Generate HOST:PORT PROMPT. */
public final class Generate {
  /** Asked to come back, gRPC does so by itself, after the time that the refusal names. */
  static final Map<String, ?> RETRY = Map.of("methodConfig", List.of(Map.of(
      "name", List.of(Map.of("service", "pdserve.v1.InferenceService")),
      "retryPolicy", Map.of("maxAttempts", 2.0, "initialBackoff", "1s", "maxBackoff", "30s", "backoffMultiplier", 2.0,
          "retryableStatusCodes", List.of("RESOURCE_EXHAUSTED", "UNAVAILABLE")))));

  public static void main(String[] args) {
    var channel = ManagedChannelBuilder.forTarget(args[0]).usePlaintext().defaultServiceConfig(RETRY).enableRetry().build();
    var stub = InferenceServiceGrpc.newBlockingStub(channel).withDeadlineAfter(2, TimeUnit.MINUTES);
    var request = GenerateRequest.newBuilder()
        .setText(args[1])
        .setSampling(SamplingOptions.newBuilder().setTemperature(0))
        .setStopping(StoppingOptions.newBuilder().setMaxTokens(32))
        .build();
    var tokens = new StringJoiner(" ", "\ntokens: ", "");
    try {
      stub.generate(request).forEachRemaining(response -> {
        System.out.print(response.getOutput().getText());
        System.out.flush();
        response.getOutput().getTokensList().forEach(token -> tokens.add(String.valueOf(token.getId())));
      });
      System.out.println(tokens);
    } finally {
      channel.shutdownNow();
    }
  }
}
