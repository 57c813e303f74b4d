package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math/rand"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
	"github.com/genie-lock/genie/clients/go/internal/servers"
)

// runWithKills runs the bank while Redis and two servers are killed and started again.
func runWithKills(length time.Duration) error {
	folder, err := os.MkdirTemp("", "redis")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	redis := servers.Redis(folder)
	all := []*servers.Process{redis}
	for i := 0; i < 2; i++ {
		all = append(all, servers.Genie(redis.WithRedis(), "GENIE_LEASE=1"))
	}
	var addresses []string
	for i, server := range all {
		defer server.Kill()
		if err := server.Start(); err != nil {
			return err
		}
		if i > 0 {
			addresses = append(addresses, server.Address)
		}
	}
	os.Setenv("GENIE_HOST", strings.Join(addresses, ","))
	client, err := genie.Dial(context.Background(), genie.Config{ConnectTimeout: 30 * time.Second})
	if err != nil {
		return err
	}
	defer client.Close()
	observer := &observer{addresses: addresses}
	go observer.run()
	kills := 0
	err = bank(length, false, func(end time.Time) error {
		for time.Now().Before(end) {
			time.Sleep(time.Duration(1000+rand.Intn(2000)) * time.Millisecond)
			victim := all[rand.Intn(len(all))]
			victim.Kill()
			kills++
			time.Sleep(time.Duration(rand.Intn(1500)) * time.Millisecond)
			if err := victim.Start(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Printf("kills %d, events watched %d, overlaps %d\n", kills, observer.events.Load(), observer.overlaps.Load())
	if observer.overlaps.Load() > 0 {
		return errors.New("two clerks held one lock")
	}
	if observer.events.Load() == 0 {
		return errors.New("the watch has seen nothing")
	}
	return checkNothingIsLeft(client)
}

// checkNothingIsLeft waits until no lock is held. A lock whose `locked` was lost together with its server's
// state may remain for its transaction timeout.
func checkNothingIsLeft(client *genie.Client) error {
	var inspection *genie.Inspection
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		var err error
		inspection, err = client.Inspect(ctx, genie.Query{})
		cancel()
		if err == nil && inspection.HoldersTotal+inspection.QueueTotal == 0 {
			return nil
		}
	}
	return fmt.Errorf("locks are left: %+v", inspection)
}

// observer watches the locks on a connection of its own, without the client, which would hide an overlap.
type observer struct {
	addresses        []string
	events, overlaps atomic.Int64
}

func (o *observer) run() {
	for i := 0; ; i++ {
		if connection, err := net.Dial("tcp", o.addresses[i%len(o.addresses)]); err == nil {
			o.watch(connection)
			connection.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// watch compares the events of one connection: a lock must end before the next one on its resource begins.
func (o *observer) watch(connection net.Conn) {
	fmt.Fprintln(connection, `{"command":"watch","payload":{"prefix":"accounts/"}}`)
	type row struct {
		Resource, State string
		ID              int64
	}
	held := map[string]int64{}
	lines := bufio.NewReader(connection)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return
		}
		var message struct {
			Command string
			Payload struct {
				row
				Held []row
			}
		}
		if err := json.Unmarshal(line, &message); err != nil {
			log.Fatalf("%s: %v", line, err)
		}
		payload := message.Payload
		switch {
		case message.Command == "watching":
			for _, lock := range payload.Held {
				held[lock.Resource] = lock.ID
			}
		case message.Command != "event" || payload.State == "lagged":
			return // a follower, or events are missing
		case payload.State == "locked":
			o.events.Add(1)
			if other, overlaps := held[payload.Resource]; overlaps && other != payload.ID {
				log.Printf("%s: %d is locked while %d is held", payload.Resource, payload.ID, other)
				o.overlaps.Add(1)
			}
			held[payload.Resource] = payload.ID
		case payload.State == "unlocked" && held[payload.Resource] == payload.ID:
			delete(held, payload.Resource)
		}
	}
}
