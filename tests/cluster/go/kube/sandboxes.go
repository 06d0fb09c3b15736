package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandboxes SOCKET ends every pod of a container runtime and removes what is left of those of an earlier cluster.
// Images stay.
func sandboxes(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("sandboxes SOCKET")
	}
	connection, err := grpc.NewClient("unix://"+arguments[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	runtime := cri.NewRuntimeServiceClient(connection)
	pods, err := runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var failures []error
	for _, pod := range pods.Items {
		_, stopped := runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod.Id})
		_, removed := runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.Id})
		failures = append(failures, stopped, removed)
	}
	return errors.Join(failures...)
}
