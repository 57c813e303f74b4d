// Package servers starts real servers, for the tests, the benchmark and the example.
package servers

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

const startLimit = 60 * time.Second

// Process is a server process on a port of the loopback.
type Process struct {
	Address string
	command []string
	env     []string
	ready   func(*Process) error
	process *exec.Cmd
	output  *bufio.Scanner
}

// Genie returns a Genie server that is not started yet, with settings such as "GENIE_TOKEN=secret". The
// variable GENIE_COMMAND is the command, such as ".venv/bin/genie"; default: genie.
func Genie(settings ...string) *Process {
	command := strings.Fields(os.Getenv("GENIE_COMMAND"))
	if len(command) == 0 {
		command = []string{"genie"}
	}
	address := freeAddress()
	_, port, _ := net.SplitHostPort(address)
	env := append([]string{"GENIE_PORT=" + port, "GENIE_ADMIN_PORT="}, settings...)
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "GENIE_") {
			env = append(env, variable)
		}
	}
	return &Process{Address: address, command: append(command, "serve"), env: env, ready: untilListening}
}

// Redis returns a Redis server that is not started yet. Its data in the folder survive a kill.
func Redis(folder string) *Process {
	address := freeAddress()
	_, port, _ := net.SplitHostPort(address)
	command := []string{
		"redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", "",
		"--appendonly", "yes", "--appendfsync", "no", "--loglevel", "warning",
	}
	return &Process{Address: address, command: command, env: os.Environ(), ready: untilRedisAnswers}
}

// WithRedis returns the setting for a Genie server that keeps its locks in Redis.
func (p *Process) WithRedis() string { return "GENIE_REDIS_URL=redis://" + p.Address + "/0" }

// Start starts the process and waits until it accepts connections.
func (p *Process) Start() error {
	p.process = exec.Command(p.command[0], p.command[1:]...)
	p.process.Env = p.env
	stdout, err := p.process.StdoutPipe()
	if err != nil {
		return err
	}
	p.output = bufio.NewScanner(stdout)
	p.output.Buffer(nil, 1<<20)
	if err := p.process.Start(); err != nil {
		p.process = nil
		return err
	}
	err = p.ready(p)
	go func(output *bufio.Scanner) { // the process must never wait for a reader
		for output.Scan() {
		}
	}(p.output)
	if err != nil {
		p.Kill()
	}
	return err
}

// Kill kills the process, if it runs.
func (p *Process) Kill() {
	if p.process != nil {
		_ = p.process.Process.Kill()
		_ = p.process.Wait()
		p.process = nil
	}
}

// Signal sends a signal to the process.
func (p *Process) Signal(signal os.Signal) error { return p.process.Process.Signal(signal) }

func untilListening(p *Process) error {
	for p.output.Scan() {
		var line struct{ Event string }
		if json.Unmarshal(p.output.Bytes(), &line) == nil && strings.HasPrefix(line.Event, "listening") {
			return nil
		}
	}
	return fmt.Errorf("%v ended before it was listening", p.command)
}

func untilRedisAnswers(p *Process) error {
	for end := time.Now().Add(startLimit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		connection, err := net.Dial("tcp", p.Address)
		if err != nil {
			continue
		}
		answer := make([]byte, 5)
		_ = connection.SetDeadline(time.Now().Add(time.Second))
		_, _ = connection.Write([]byte("PING\r\n"))
		n, _ := connection.Read(answer)
		connection.Close()
		if string(answer[:n]) == "+PONG" {
			return nil
		}
	}
	return fmt.Errorf("%v does not answer", p.command)
}

func freeAddress() string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}
