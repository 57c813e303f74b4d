package genie_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/big"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
)

func ExampleDial() {
	client, err := genie.Dial(context.Background(), genie.Config{Addresses: []string{"lock-1:7077", "lock-2:7077"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}

func ExampleClient_Do() {
	var client *genie.Client
	err := client.Do(context.Background(), []string{"exclusive:accounts/2", "exclusive:accounts/13"},
		func(ctx context.Context, lock *genie.Lock) error {
			// ctx is cancelled when the lock is lost. The data store rejects writes with an old fence.
			return transfer(ctx, lock.Fence())
		}, genie.TransactionTimeout(30*time.Second))
	if errors.Is(err, genie.ErrLockLost) {
		fmt.Println("undo the transfer")
	}
}

func transfer(context.Context, int64) error { return nil }

func ExampleClient_Acquire() {
	var client *genie.Client
	ctx := context.Background()
	lock, err := client.Acquire(ctx, []string{genie.Shared("reports/2026")}, genie.QueueTimeout(5*time.Second), genie.Watchdog())
	var timeout *genie.QueueTimeoutError
	if errors.As(err, &timeout) {
		fmt.Println("blocked by", timeout.Blockers)
	}
	if err != nil {
		return
	}
	defer lock.Release(ctx)
}

func ExampleClient_AcquireAny() {
	var client *genie.Client
	lock, err := client.AcquireAny(context.Background(), genie.AnyOf{
		Resources: []string{"token/1", "token/2", "token/3"},
		Weights:   genie.Weights(50, 20, 20),
		Target:    big.NewInt(35),
	}, genie.Transaction("transfer-42"))
	if err == nil {
		fmt.Println(lock.Resources())
	}
}

func ExampleClient_Watch() {
	var client *genie.Client
	watch, err := client.Watch("token/")
	if err != nil {
		log.Fatal(err)
	}
	defer watch.Close()
	for {
		change, err := watch.Next(context.Background())
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(change.Resource, change.State)
	}
}
