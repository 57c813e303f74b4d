package genie

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"time"
	"unicode/utf8"
)

const (
	protocolVersion = 1
	clientName      = "genie-go/0.1.0"
	maxCommand      = 1 << 20       // bytes in a line, of the server
	maxMessage      = 1 << 28       // a `released` with the cycle of a deadlock may be long
	maxTimeoutMS    = math.MaxInt32 // as a queue timeout: no limit
	maxTimeout      = maxTimeoutMS * time.Millisecond

	reasonSuccess            = "success"
	reasonTransactionTimeout = "transaction-timeout"
	reasonDisconnected       = "disconnected"
	reasonLost               = "lost" // not a reason of the wire: the server does not know the lock
)

// fields are the fields of all commands. protocol.md describes them.
type fields struct {
	Ref                string   `json:"ref"`
	ID                 int64    `json:"id,omitempty"`
	Resources          []string `json:"resources,omitempty"`
	AnyOf              []string `json:"anyOf,omitempty"`
	Weights            []string `json:"weights,omitempty"`
	Target             string   `json:"target,omitempty"`
	QueueTimeout       *float64 `json:"queueTimeout,omitempty"`
	TransactionTimeout *float64 `json:"transactionTimeout,omitempty"`
	Transaction        string   `json:"transactionName,omitempty"`
	Priority           int      `json:"priority,omitempty"`
	OnDisconnect       string   `json:"onDisconnect,omitempty"`
	Note               string   `json:"note,omitempty"`
	Prefix             *string  `json:"prefix,omitempty"`
	Resource           string   `json:"resource,omitempty"`
	Limit              int      `json:"limit,omitempty"`
	Only               string   `json:"only,omitempty"`
	Protocol           int      `json:"protocol,omitempty"`
	Client             string   `json:"client,omitempty"`
	Quiet              bool     `json:"quiet,omitempty"`
	Session            string   `json:"session,omitempty"`
	SessionTimeout     *float64 `json:"sessionTimeout,omitempty"`
	Token              string   `json:"token,omitempty"`
	Namespace          string   `json:"namespace,omitempty"`
}

// encode returns the line of a command.
func encode(name string, f *fields) []byte {
	line, err := json.Marshal(struct {
		Command string  `json:"command"`
		Payload *fields `json:"payload"`
	}{name, f})
	if err != nil {
		panic(err) // texts and finite numbers can be encoded
	}
	return append(line, '\n')
}

// check returns an error for what the server could not answer by its ref: it would see other texts, or reject the line.
func (f *fields) check(line []byte) error {
	if len(line) > maxCommand {
		return &RejectedError{Code: "bad-request", Message: fmt.Sprintf("a command must not have more than %d bytes", maxCommand)}
	}
	for _, texts := range [][]string{f.Resources, f.AnyOf, {f.Transaction, f.Note, f.Resource, f.Only, f.Token, f.Namespace}} {
		for _, text := range texts {
			if !utf8.ValidString(text) {
				return &RejectedError{Code: "bad-request", Message: fmt.Sprintf("%q is not valid UTF-8", text)}
			}
		}
	}
	if f.Prefix != nil && !utf8.ValidString(*f.Prefix) {
		return &RejectedError{Code: "bad-request", Message: fmt.Sprintf("%q is not valid UTF-8", *f.Prefix)}
	}
	return nil
}

// message is a message of the server, with the fields of all messages. protocol.md describes them.
type message struct {
	Command string
	Payload struct {
		Ref       string
		ID, Fence int64
		ExpiresIn *float64
		Resources []string
		Inspection

		Reason                string
		Waited                float64
		Blockers              []Blocker
		BlockersTotal         int
		Cycle                 []string
		Waits                 []WaitEdge
		Free, Locked          json.Number
		Code, Message, Leader string

		Protocol     int
		Namespace    string
		PingInterval float64
		Resumed      bool

		Held                                   json.RawMessage // of `watching`: rows; of `released`: a number
		Truncated                              bool
		State, Resource, Mode, TransactionName string // of `event`
	}
}

// decode decodes a message. A message of a newer server may have fields of other types: then it has only its command.
func decode(line []byte) (*message, error) {
	m := &message{}
	err := json.Unmarshal(line, m)
	if err != nil && !(errors.As(err, new(*json.UnmarshalTypeError)) && !knownMessages[m.Command]) {
		return nil, fmt.Errorf("the server sent an invalid message: %.80q (%w)", line, err)
	}
	return m, nil
}

var knownMessages = map[string]bool{
	"welcome": true, "locked": true, "released": true, "extended": true, "pong": true, "inspected": true,
	"watching": true, "event": true, "unwatched": true, "bye": true, "error": true,
}

// UnmarshalJSON decodes a blocker as the server sends it.
func (b *Blocker) UnmarshalJSON(text []byte) error {
	type plain Blocker
	row := struct {
		*plain
		TransactionName string
		Since           float64
	}{plain: (*plain)(b)}
	err := json.Unmarshal(text, &row)
	b.Transaction, b.Since = row.TransactionName, unixMS(row.Since)
	return err
}

// UnmarshalJSON decodes a request as the server sends it.
func (r *Request) UnmarshalJSON(text []byte) error {
	type plain Request
	row := struct {
		*plain
		TransactionName string
		Since           float64
		ExpiresIn       *float64
	}{plain: (*plain)(r)}
	err := json.Unmarshal(text, &row)
	r.Transaction, r.Since, r.ExpiresIn = row.TransactionName, unixMS(row.Since), NoTimeout
	if row.ExpiresIn != nil {
		r.ExpiresIn = fromMS(*row.ExpiresIn)
	}
	return err
}

// toMS returns a duration in milliseconds. A duration beyond the limit of the protocol becomes the limit.
func toMS(d time.Duration) *float64 {
	ms := math.Min(float64(d)/float64(time.Millisecond), maxTimeoutMS)
	return &ms
}

func fromMS(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func unixMS(ms float64) time.Time { return time.UnixMicro(int64(ms * 1000)) }

func toBig(n json.Number) *big.Int {
	i, _ := new(big.Int).SetString(n.String(), 10)
	return i
}
