// Command bench compares the client with a loop that writes and reads the same lines on a socket of its
// own: lock + release by one goroutine, and by 64 goroutines on one connection.
//
//	bench [HOST:PORT] [--rounds N] [--seconds S]
//
// Without HOST:PORT it starts a server (GENIE_COMMAND). It prints JSON: cycles per second, as medians of
// the rounds, and the median of the ratios of the rounds.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"runtime"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	genie "github.com/genie-lock/genie/clients/go"
	"github.com/genie-lock/genie/clients/go/internal/servers"
)

const tasks = 64

type result struct {
	Tasks  int     `json:"tasks"`
	Raw    float64 `json:"raw"`
	Client float64 `json:"client"`
	Ratio  float64 `json:"ratio"`
}

func main() {
	rounds := flag.Int("rounds", 9, "number of rounds")
	seconds := flag.Float64("seconds", 0.7, "duration of each loop")
	address, arguments := "", os.Args[1:]
	if len(arguments) > 0 && !strings.HasPrefix(arguments[0], "-") { // flags may follow it
		address, arguments = arguments[0], arguments[1:]
	}
	_ = flag.CommandLine.Parse(arguments) // exits after an error
	length := time.Duration(*seconds * float64(time.Second))
	if address == "" {
		server := servers.Genie()
		if err := server.Start(); err != nil {
			log.Fatal(err)
		}
		defer server.Kill()
		address = server.Address
	}
	client, err := genie.Dial(context.Background(), genie.Config{Addresses: []string{address}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	raw, err := dial(address)
	if err != nil {
		log.Fatal(err)
	}
	var samples [4][]float64
	for round := -1; round < *rounds; round++ { // the first round warms up
		for i, measure := range []func(time.Duration) int{
			func(length time.Duration) int { return raw.loop(1, length) },
			func(length time.Duration) int { return loop(client, 1, length) },
			func(length time.Duration) int { return raw.loop(tasks, length) },
			func(length time.Duration) int { return loop(client, tasks, length) },
		} {
			start := time.Now()
			pairs := measure(length)
			if round >= 0 {
				samples[i] = append(samples[i], float64(pairs)/time.Since(start).Seconds())
			}
		}
	}
	text, _ := json.Marshal(map[string]any{
		"language": "go", "runtime": runtime.Version(),
		"results": []result{compare(1, samples[0], samples[1]), compare(tasks, samples[2], samples[3])},
	})
	fmt.Println(string(text))
}

// compare returns the medians of the rates, and the median of the ratios of each round.
func compare(tasks int, raw, client []float64) result {
	ratios := make([]float64, len(raw))
	for i := range raw {
		ratios[i] = client[i] / raw[i]
	}
	return result{tasks, median(raw), median(client), median(ratios)}
}

func median(values []float64) float64 {
	sort.Float64s(values)
	return values[len(values)/2]
}

// loop locks and releases with the client in a number of goroutines, and returns the number of pairs.
func loop(client *genie.Client, goroutines int, length time.Duration) int {
	var pairs atomic.Int64
	var group sync.WaitGroup
	end := time.Now().Add(length)
	for i := 0; i < goroutines; i++ {
		group.Add(1)
		go func(resources []string) {
			defer group.Done()
			for time.Now().Before(end) {
				lock, err := client.Acquire(context.Background(), resources)
				if err != nil {
					log.Fatal(err)
				}
				if err := lock.Release(context.Background()); err != nil {
					log.Fatal(err)
				}
				pairs.Add(1)
			}
		}([]string{fmt.Sprint("exclusive:bench/client/", i)})
	}
	group.Wait()
	return int(pairs.Load())
}

// rawConnection writes and reads lines itself.
type rawConnection struct {
	net.Conn
	lines *bufio.Reader
	ref   int
}

func dial(address string) (*rawConnection, error) {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	raw := &rawConnection{connection, bufio.NewReaderSize(connection, 1<<16), 0}
	fmt.Fprintln(raw, `{"command":"hello","payload":{"protocol":1,"quiet":true,"session":"a-secret-of-the-benchmark"}}`)
	_, err = raw.lines.ReadBytes('\n')
	return raw, err
}

// loop keeps a number of locks in flight: each answer is followed by the next command of its task. The
// commands that follow the answers of one read are written together.
func (r *rawConnection) loop(inFlight int, length time.Duration) int {
	var message struct {
		Command string
		Payload struct {
			ID  int64
			Ref string
		}
	}
	pairs, waiting := 0, inFlight
	var output []byte
	tasks := map[string]int{}
	request := func(task int) {
		r.ref++
		ref := fmt.Sprint(r.ref)
		tasks[ref] = task
		output = append(output, fmt.Sprintf(`{"command":"request","payload":{"resources":["exclusive:bench/raw/%d"],`+
			`"queueTimeout":10000,"transactionTimeout":10000,"ref":"%s"}}`+"\n", task, ref)...)
	}
	for task := 0; task < inFlight; task++ {
		request(task)
	}
	end := time.Now().Add(length)
	for waiting > 0 {
		if r.lines.Buffered() == 0 {
			if _, err := r.Write(output); err != nil {
				log.Fatal(err)
			}
			output = output[:0]
		}
		line, err := r.lines.ReadSlice('\n')
		if err != nil {
			log.Fatal(err)
		}
		if err := json.Unmarshal(line, &message); err != nil {
			log.Fatal(err)
		}
		task := tasks[message.Payload.Ref]
		delete(tasks, message.Payload.Ref)
		if message.Command == "locked" {
			r.ref++
			ref := fmt.Sprint(r.ref)
			tasks[ref] = task
			output = append(output, fmt.Sprintf(`{"command":"release","payload":{"id":%d,"ref":"%s"}}`+"\n", message.Payload.ID, ref)...)
			continue
		}
		pairs++
		if time.Now().Before(end) {
			request(task)
		} else {
			waiting--
		}
	}
	return pairs
}
