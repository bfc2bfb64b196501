// Stream one answer: generate HOST:PORT PROMPT
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "pdserve.internal/v1"
)

// Asked to come back, gRPC does so by itself, after the time that the refusal names.
const retry = `{"methodConfig": [{"name": [{"service": "pdserve.v1.InferenceService"}], "retryPolicy": {
	"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
	"retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"]}}]}`

func main() {
	conn, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultServiceConfig(retry))
	check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	stream, err := pb.NewInferenceServiceClient(conn).Generate(ctx, &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: os.Args[2]},
		Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0)},
		Stopping: &pb.StoppingOptions{MaxTokens: proto.Uint32(32)},
	})
	check(err)
	var tokens []interface{}
	response, err := stream.Recv()
	for ; err == nil; response, err = stream.Recv() {
		fmt.Print(response.GetOutput().GetText())
		for _, token := range response.GetOutput().GetTokens() {
			tokens = append(tokens, token.GetId())
		}
	}
	if err != io.EOF {
		log.Fatal(err)
	}
	fmt.Println(append([]interface{}{"\ntokens:"}, tokens...)...)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
