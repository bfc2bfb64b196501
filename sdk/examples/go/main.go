// Stream one answer: generate HOST:PORT PROMPT
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "pdserve.internal/v1"
)

// generate prints the text as it comes and returns the token ids.
func generate(client pb.InferenceServiceClient, prompt string) ([]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	stream, err := client.Generate(ctx, &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: prompt},
		Sampling: &pb.SamplingOptions{Temperature: proto.Float32(0)},
		Stopping: &pb.StoppingOptions{MaxTokens: proto.Uint32(32)},
	})
	if err != nil {
		return nil, err
	}
	var tokens []string
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return tokens, nil
		} else if err != nil {
			return nil, err
		}
		for _, token := range response.GetOutput().GetTokens() {
			tokens = append(tokens, fmt.Sprint(token.GetId()))
		}
		fmt.Print(response.GetOutput().GetText())
	}
}

// retryDelay is how long a full fleet wants not to be asked again; false for any other error.
func retryDelay(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if retry, ok := detail.(*errdetails.RetryInfo); ok {
			return retry.GetRetryDelay().AsDuration(), true
		}
	}
	return 0, false
}

func main() {
	conn, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	client := pb.NewInferenceServiceClient(conn)
	tokens, err := generate(client, os.Args[2])
	if delay, full := retryDelay(err); full {
		time.Sleep(delay)
		tokens, err = generate(client, os.Args[2])
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("\ntokens:", strings.Join(tokens, " "))
}
