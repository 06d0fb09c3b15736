package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
)

const (
	heartbeat    = 10 * time.Second // a node is lost after 40
	podsAtOnce   = 16
	retryFloor   = 50 * time.Millisecond
	retryCeiling = 10 * time.Second
)

// unreal plays the kubelets of nodes without machines: their pods are Running and ready as soon as they are
// scheduled, run nothing, and are gone as soon as they are deleted.
func unreal(arguments []string) error {
	flags := flag.NewFlagSet("unreal", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "how to reach the API server")
	nodes := flags.Int("nodes", 1, "how many")
	_ = flags.Parse(arguments)
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = 500, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	for number := range *nodes {
		if err := join(ctx, client, fmt.Sprintf("unreal-%d", number)); err != nil {
			return err
		}
	}
	player := newPlayer(client)
	player.run(ctx)
	ticks := time.NewTicker(heartbeat)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
			for number := range *nodes {
				if err := beat(ctx, client, fmt.Sprintf("unreal-%d", number)); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}
		}
	}
}

func join(ctx context.Context, client *kubernetes.Clientset, name string) error {
	room := core.ResourceList{}
	for resourceName, quantity := range map[core.ResourceName]string{
		core.ResourceCPU: "1000", core.ResourceMemory: "10Ti", core.ResourcePods: "1000", "nvidia.com/gpu": "1000",
	} {
		room[resourceName] = resource.MustParse(quantity)
	}
	node := &core.Node{
		ObjectMeta: meta.ObjectMeta{Name: name, Labels: map[string]string{core.LabelHostname: name}},
		Status: core.NodeStatus{
			Allocatable: room,
			Capacity:    room,
			Conditions: []core.NodeCondition{{
				Type: core.NodeReady, Status: core.ConditionTrue, Reason: "Unreal", LastHeartbeatTime: meta.Now(),
				LastTransitionTime: meta.Now(),
			}},
		},
	}
	if _, err := client.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{}); err != nil && !errors.IsAlreadyExists(err) {
		return err
	}
	return beat(ctx, client, name)
}

func beat(ctx context.Context, client *kubernetes.Clientset, name string) error {
	leases := client.CoordinationV1().Leases(core.NamespaceNodeLease)
	seconds, now := int32(40), meta.NowMicro()
	spec := coordination.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: &seconds, RenewTime: &now}
	patch, err := json.Marshal(map[string]any{"spec": spec})
	if err != nil {
		return err
	}
	_, err = leases.Patch(ctx, name, types.MergePatchType, patch, meta.PatchOptions{})
	if errors.IsNotFound(err) {
		_, err = leases.Create(ctx, &coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: spec}, meta.CreateOptions{})
	}
	return err
}

type player struct {
	client *kubernetes.Clientset
	pods   cache.SharedIndexInformer
	queue  workqueue.TypedRateLimitingInterface[string]
}

func newPlayer(client *kubernetes.Clientset) *player {
	scheduled := func(options *meta.ListOptions) {
		options.FieldSelector = fields.OneTermNotEqualSelector("spec.nodeName", "").String()
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(scheduled))
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFloor, retryCeiling)
	return &player{client, factory.Core().V1().Pods().Informer(), workqueue.NewTypedRateLimitingQueue(limiter)}
}

func (p *player) run(ctx context.Context) {
	look := func(object any) {
		if key, err := cache.MetaNamespaceKeyFunc(object); err == nil {
			p.queue.Add(key)
		}
	}
	_, err := p.pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    look,
		UpdateFunc: func(_, object any) { look(object) },
	})
	if err != nil {
		panic(err) // only of an informer that was stopped
	}
	go p.pods.Run(ctx.Done())
	go func() { <-ctx.Done(); p.queue.ShutDown() }()
	for range podsAtOnce {
		go p.work(ctx)
	}
}

func (p *player) work(ctx context.Context) {
	for {
		key, over := p.queue.Get()
		if over {
			return
		}
		if err := p.play(ctx, key); err != nil && !errors.IsNotFound(err) {
			fmt.Fprintln(os.Stderr, key, err)
			p.queue.AddRateLimited(key)
		} else {
			p.queue.Forget(key)
		}
		p.queue.Done(key)
	}
}

func (p *player) play(ctx context.Context, key string) error {
	object, exists, err := p.pods.GetStore().GetByKey(key)
	if err != nil || !exists {
		return err
	}
	pod := object.(*core.Pod)
	mine := p.client.CoreV1().Pods(pod.Namespace)
	if pod.DeletionTimestamp != nil {
		now := int64(0)
		return mine.Delete(ctx, pod.Name, meta.DeleteOptions{GracePeriodSeconds: &now})
	}
	if pod.Status.Phase != core.PodPending {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"status": running(pod)})
	if err != nil {
		return err
	}
	_, err = mine.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, meta.PatchOptions{}, "status")
	return err
}

func running(pod *core.Pod) core.PodStatus {
	now, yes := meta.Now(), true
	status := core.PodStatus{
		Phase: core.PodRunning, StartTime: &now, PodIP: "192.0.2.1", PodIPs: []core.PodIP{{IP: "192.0.2.1"}},
	}
	for _, kind := range []core.PodConditionType{core.PodInitialized, core.ContainersReady, core.PodReady} {
		status.Conditions = append(status.Conditions, core.PodCondition{
			Type: kind, Status: core.ConditionTrue, LastTransitionTime: now,
		})
	}
	for _, container := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, core.ContainerStatus{
			Name: container.Name, Image: container.Image, Ready: true, Started: &yes,
			State: core.ContainerState{Running: &core.ContainerStateRunning{StartedAt: now}},
		})
	}
	return status
}
