// Command bench compares the client with a loop that writes and reads the same lines on a socket of its
// own: lock + release by one goroutine, and by 64 goroutines on one connection. It starts a server
// (GENIE_COMMAND), unless GENIE_HOST names one, and prints JSON: pairs of a lock and its release per
// second, as medians of several rounds that alternate.
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
	"sort"
	"sync"
	"sync/atomic"
	"time"

	genie "github.com/genie-lock/genie-go"
	"github.com/genie-lock/genie-go/internal/servers"
)

const tasks = 64

type result struct {
	Raw    int     `json:"raw"`
	Client int     `json:"client"`
	Ratio  float64 `json:"ratio"`
}

func main() {
	rounds := flag.Int("rounds", 9, "number of rounds")
	length := flag.Duration("length", 700*time.Millisecond, "length of each measurement")
	flag.Parse()
	address := os.Getenv("GENIE_HOST")
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
			pairs := measure(*length)
			if round >= 0 {
				samples[i] = append(samples[i], float64(pairs)/time.Since(start).Seconds())
			}
		}
	}
	report := map[string]result{"one task": compare(samples[0], samples[1])}
	report[fmt.Sprint(tasks, " tasks")] = compare(samples[2], samples[3])
	text, _ := json.MarshalIndent(report, "", "  ")
	fmt.Println(string(text))
}

// compare returns the medians of the rates, and the median of the ratios of each round.
func compare(raw, client []float64) result {
	ratios := make([]float64, len(raw))
	for i := range raw {
		ratios[i] = client[i] / raw[i]
	}
	return result{int(median(raw)), int(median(client)), float64(int(median(ratios)*1000)) / 1000}
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
