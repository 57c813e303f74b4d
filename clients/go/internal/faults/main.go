// Command faults runs the bank while Redis and two servers are killed and started again, and while connections between the
// clerks and the servers become half-open: the server's side is reset, and the clerk's side is silent.
//
//	faults -bank PROGRAM [-for 2m]
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
	"github.com/genie-lock/genie/clients/go/internal/servers"
)

const accounts = 10 // of the bank

func main() {
	log.SetFlags(0)
	bank := flag.String("bank", "", "the program of the bank")
	length := flag.Duration("for", 20*time.Second, "duration of the run")
	flag.Parse()
	if err := run(*bank, *length); err != nil {
		log.Fatalf("faults: %v", err)
	}
}

func run(bank string, length time.Duration) error {
	folder, err := os.MkdirTemp("", "redis")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	redis := servers.Redis(folder)
	all := []*servers.Process{redis}
	var direct, proxied []string
	var proxies []*proxy
	for i := 0; i < 2; i++ {
		p, err := newProxy()
		if err != nil {
			return err
		}
		// Followers name the proxy of the leader, so that all connections of the clerks lead through the proxies.
		server := servers.Genie(redis.WithRedis(), "GENIE_LEASE=1", "GENIE_ADVERTISE="+p.Addr().String())
		p.server = server.Address
		all, direct = append(all, server), append(direct, server.Address)
		proxied, proxies = append(proxied, p.Addr().String()), append(proxies, p)
	}
	for _, server := range all {
		defer server.Kill()
		if err := server.Start(); err != nil {
			return err
		}
	}
	client, err := genie.Dial(context.Background(), genie.Config{Addresses: direct})
	if err != nil {
		return err
	}
	defer client.Close()
	observer := &observer{addresses: direct}
	go observer.run()
	command := exec.Command(bank, "-for", length.String())
	command.Env = append(os.Environ(), "GENIE_HOST="+strings.Join(proxied, ","))
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	if err := command.Start(); err != nil {
		return err
	}
	kills, halfOpened, err := inject(time.Now().Add(length), all, proxies)
	if bankErr := command.Wait(); err == nil {
		err = bankErr
	}
	if err != nil {
		return err
	}
	fmt.Printf("kills %d, half-open connections %d, events watched %d, overlaps %d\n",
		kills, halfOpened, observer.events.Load(), observer.overlaps.Load())
	switch {
	case observer.overlaps.Load() > 0:
		return errors.New("two clerks held one lock")
	case observer.events.Load() == 0:
		return errors.New("the watch has seen nothing")
	case halfOpened == 0:
		return errors.New("no connection became half-open")
	}
	return checkNothingIsLeft(client)
}

// inject injects a fault every second or two: it kills a process for a moment, or makes a connection half-open.
func inject(end time.Time, all []*servers.Process, proxies []*proxy) (kills, halfOpened int, err error) {
	for n := 0; time.Now().Before(end); n++ {
		time.Sleep(time.Duration(1000+rand.Intn(1000)) * time.Millisecond)
		if n%3 > 0 {
			for _, proxy := range proxies { // one of them is that of the leader
				halfOpened += proxy.halfOpen()
			}
			continue
		}
		victim := all[rand.Intn(len(all))]
		victim.Kill()
		kills++
		time.Sleep(time.Duration(rand.Intn(1500)) * time.Millisecond)
		if err := victim.Start(); err != nil {
			return kills, halfOpened, err
		}
	}
	return kills, halfOpened, nil
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

// watch compares the events of one connection: a lock must end before that of another transaction on its resource begins.
// A transaction may hold two: one of a session that has ended, and one that its client has requested again.
func (o *observer) watch(connection net.Conn) {
	fmt.Fprintln(connection, `{"command":"watch","payload":{"prefix":"accounts/"}}`)
	type row struct {
		Resource, State, TransactionName string
		ID                               int64
	}
	held := map[string]map[int64]string{} // the transactions of the locks, by resource and id
	for i := 0; i < accounts; i++ {
		held[fmt.Sprint("accounts/", i)] = map[int64]string{}
	}
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
		event := message.Payload.row
		switch {
		case message.Command == "watching":
			for _, lock := range message.Payload.Held {
				held[lock.Resource][lock.ID] = lock.TransactionName
			}
		case message.Command != "event" || event.State == "lagged":
			return // a follower, or events are missing
		case event.State == "locked":
			o.events.Add(1)
			for id, transaction := range held[event.Resource] {
				if id != event.ID && (transaction == "" || transaction != event.TransactionName) {
					log.Printf("%s: %d is locked while %d is held", event.Resource, event.ID, id)
					o.overlaps.Add(1)
				}
			}
			held[event.Resource][event.ID] = event.TransactionName
		case event.State == "unlocked":
			delete(held[event.Resource], event.ID)
		}
	}
}
