import com.google.rpc.RetryInfo;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import pdserve.v1.GenerateRequest;
import pdserve.v1.InferenceServiceGrpc;
import pdserve.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;
import pdserve.v1.SamplingOptions;
import pdserve.v1.StoppingOptions;

/** Streams one answer: Generate HOST:PORT PROMPT. */
public final class Generate {
  /** Prints the text as it comes and returns the token ids. */
  static List<Integer> generate(InferenceServiceBlockingStub stub, GenerateRequest request) {
    List<Integer> tokens = new ArrayList<>();
    stub.withDeadlineAfter(2, TimeUnit.MINUTES).generate(request).forEachRemaining(response -> {
      response.getOutput().getTokensList().forEach(token -> tokens.add(token.getId()));
      System.out.print(response.getOutput().getText());
      System.out.flush();
    });
    return tokens;
  }

  /** Milliseconds after which a full fleet wants to be asked again. Any other error is thrown. */
  static long retryDelay(StatusRuntimeException error) throws Exception {
    for (var detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(RetryInfo.class)) {
        var delay = detail.unpack(RetryInfo.class).getRetryDelay();
        return TimeUnit.SECONDS.toMillis(delay.getSeconds()) + delay.getNanos() / 1_000_000;
      }
    }
    throw error;
  }

  public static void main(String[] args) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(args[0]).usePlaintext().build();
    try {
      var stub = InferenceServiceGrpc.newBlockingStub(channel);
      var request = GenerateRequest.newBuilder()
          .setText(args[1])
          .setSampling(SamplingOptions.newBuilder().setTemperature(0))
          .setStopping(StoppingOptions.newBuilder().setMaxTokens(32))
          .build();
      List<Integer> tokens;
      try {
        tokens = generate(stub, request);
      } catch (StatusRuntimeException error) {
        Thread.sleep(retryDelay(error));
        tokens = generate(stub, request);
      }
      System.out.println("\ntokens: " + tokens.stream().map(String::valueOf).collect(Collectors.joining(" ")));
    } finally {
      channel.shutdownNow();
    }
  }
}
