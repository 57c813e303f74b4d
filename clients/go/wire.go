package genie

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"strconv"
	"time"
	"unicode/utf8"
)

// The encoding of commands and the decoding of messages. `request`, `release`, `locked` and `released`,
// which make up nearly all of the traffic, are encoded and decoded by hand. `encoding/json` does the rest.

const (
	protocolVersion = 1
	clientName      = "genie-go/0.1.0"
	maxRequestLine  = 1 << 20       // of the server
	maxMessage      = 1 << 28       // a `released` with the cycle of a deadlock may be long
	maxTimeoutMS    = math.MaxInt32 // as a queue timeout: no limit
	maxTimeout      = maxTimeoutMS * time.Millisecond
	pingRef         = "resume" // of the ping after `hello`

	reasonSuccess            = "success"
	reasonTransactionTimeout = "transaction-timeout"
	reasonDisconnected       = "disconnected"
	reasonLost               = "lost" // not a reason of the wire: the server does not know the lock
)

// -- commands ----------------------------------------------------------------------------------------

func appendHello(b []byte, secret string, config *Config) []byte {
	b = append(b, `{"command":"hello","payload":{"protocol":`...)
	b = strconv.AppendInt(b, protocolVersion, 10)
	b = appendField(b, "client", clientName)
	b = append(b, `,"quiet":true`...)
	b = appendField(b, "session", secret)
	b = append(b, `,"sessionTimeout":`...)
	b = appendMS(b, config.SessionTimeout)
	b = appendField(b, "token", config.Token)
	b = appendField(b, "namespace", config.Namespace)
	return append(b, `,"ref":"hello"}}`+"\n"+`{"command":"ping","payload":{"ref":"`+pingRef+`"}}`+"\n"...)
}

func appendRequest(b []byte, l *Lock) []byte {
	if l.anyOf == nil {
		b = append(b, `{"command":"request","payload":{"resources":`...)
		b = appendStrings(b, l.resources)
		b = append(b, `,"queueTimeout":`...)
		b = appendMS(b, l.options.queueTimeout)
		if l.options.priority != 0 {
			b = append(b, `,"priority":`...)
			b = strconv.AppendInt(b, int64(l.options.priority), 10)
		}
	} else {
		b = append(b, `{"command":"request","payload":{"anyOf":`...)
		b = appendStrings(b, l.resources)
		b = appendWeights(b, l.anyOf)
	}
	b = append(b, `,"transactionTimeout":`...)
	b = appendMS(b, l.options.transactionTimeout)
	b = appendField(b, "transactionName", l.options.transaction)
	if l.options.releaseOnDisconnect {
		b = append(b, `,"onDisconnect":"release"`...)
	}
	b = appendField(b, "note", l.options.note)
	return appendRef(b, l.ref)
}

func appendWeights(b []byte, any *AnyOf) []byte {
	asStrings := !any.Target.IsInt64()
	for _, weight := range any.Weights {
		asStrings = asStrings || !weight.IsInt64()
	}
	appendNumber := func(n *big.Int) {
		if asStrings {
			b = append(n.Append(append(b, '"'), 10), '"')
		} else {
			b = n.Append(b, 10)
		}
	}
	for i, weight := range any.Weights {
		b = append(b, [2]string{`,"weights":[`, `,`}[min(i, 1)]...)
		appendNumber(weight)
	}
	if len(any.Weights) > 0 {
		b = append(b, ']')
	}
	b = append(b, `,"target":`...)
	appendNumber(any.Target)
	return b
}

func appendReleaseByID(b []byte, id int64, ref uint64) []byte {
	b = append(b, `{"command":"release","payload":{"id":`...)
	return appendRef(strconv.AppendInt(b, id, 10), ref)
}

func appendReleaseByRef(b []byte, ref uint64) []byte {
	b = append(b, `{"command":"release","payload":{"ref":"`...)
	return append(strconv.AppendUint(b, ref, 10), `"}}`+"\n"...)
}

func appendExtend(b []byte, id int64, timeout time.Duration, ref uint64) []byte {
	b = append(b, `{"command":"extend","payload":{"id":`...)
	b = strconv.AppendInt(b, id, 10)
	b = append(b, `,"transactionTimeout":`...)
	return appendRef(appendMS(b, timeout), ref)
}

// appendCommand appends a command with at most a prefix besides its ref: ping, bye, watch, unwatch.
func appendCommand(b []byte, command string, prefix *string, ref uint64) []byte {
	b = append(append(append(b, `{"command":"`...), command...), `","payload":{`...)
	if prefix != nil {
		b = append(appendString(append(b, `"prefix":`...), *prefix), ',')
	}
	b = append(b, `"ref":"`...)
	return append(strconv.AppendUint(b, ref, 10), `"}}`+"\n"...)
}

func appendInspect(b []byte, query *Query, ref uint64) []byte {
	text, _ := json.Marshal(query) // cannot fail: strings and integers
	b = append(append(b, `{"command":"inspect","payload":`...), text[:len(text)-1]...)
	if len(text) > len("{}") {
		b = append(b, ',')
	}
	b = append(b, `"ref":"`...)
	return append(strconv.AppendUint(b, ref, 10), `"}}`+"\n"...)
}

// appendRef appends the ref as the last field of a command, and ends its line.
func appendRef(b []byte, ref uint64) []byte {
	b = append(b, `,"ref":"`...)
	return append(strconv.AppendUint(b, ref, 10), `"}}`+"\n"...)
}

// appendField appends a field that is a string, unless the string is empty.
func appendField(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	b = append(append(append(b, `,"`...), name...), `":`...)
	return appendString(b, value)
}

func appendStrings(b []byte, values []string) []byte {
	for i, value := range values {
		b = appendString(append(b, "[,"[min(i, 1)]), value)
	}
	return append(b, ']')
}

func appendString(b []byte, value string) []byte {
	for i := 0; i < len(value); i++ {
		if c := value[i]; c < ' ' || c == '"' || c == '\\' {
			text, _ := json.Marshal(value) // cannot fail: a string
			return append(b, text...)
		}
	}
	return append(append(append(b, '"'), value...), '"')
}

// appendMS appends a duration in milliseconds. A duration beyond the limit of the protocol becomes the limit.
func appendMS(b []byte, d time.Duration) []byte {
	if d >= maxTimeout {
		return strconv.AppendInt(b, maxTimeoutMS, 10)
	}
	if d%time.Millisecond == 0 {
		return strconv.AppendInt(b, int64(d/time.Millisecond), 10)
	}
	return strconv.AppendFloat(b, float64(d/time.Microsecond)/1000, 'f', -1, 64)
}

// checkTexts returns an error if a text is not valid UTF-8: the server could not tell which command it rejects.
func checkTexts(texts ...string) error {
	for _, text := range texts {
		if !utf8.ValidString(text) {
			return &RejectedError{"bad-request", strconv.Quote(text) + " is not valid UTF-8"}
		}
	}
	return nil
}

// -- messages ----------------------------------------------------------------------------------------

// locked is the payload of `locked`. The fields of all payloads are those of protocol.md.
type locked struct {
	ID, Fence int64
	Ref       string
	ExpiresIn *float64
	Resources []string
	ref       uint64
}

type released struct {
	ID, BlockersTotal int64
	Reason, Ref       string
	Waited            float64
	Blockers          []blockerRow
	Cycle             []string
	Waits             []Wait
	Free, Locked      number
	ref               uint64
}

type blockerRow struct {
	ID                                           int64
	Resource, Mode, State, TransactionName, Note string
	Since                                        float64
}

type welcome struct {
	Protocol          int
	Server, Namespace string
	PingInterval      float64
	Resumed           bool
}

type errorReply struct{ Code, Message, Leader, Ref string }

type watching struct {
	Held      []heldRow
	Truncated bool
	Ref       string
}

type heldRow struct {
	Resource, Mode, TransactionName, State string
	ID                                     int64
}

type queuedReply struct {
	ID  int64
	Ref string
}

type (
	extendedReply struct{ Ref string }
	pongReply     struct{ Ref string }
	doneReply     struct{ Ref string } // unwatched, bye
)

type inspected struct {
	Holders, Queue           []inspectedRow
	HoldersTotal, QueueTotal int
	Ref                      string
}

type inspectedRow struct {
	ID, Fence             int64
	Resources             []string
	ResourcesTotal        int
	BlockersTotal         int
	Priority, Since       float64
	ExpiresIn             *float64
	TransactionName, Note string
	Blockers              []blockerRow
}

// number is an integer of any size, as a JSON number or as a decimal string.
type number struct{ *big.Int }

func (n *number) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	var ok bool
	if n.Int, ok = new(big.Int).SetString(string(bytes.Trim(text, `"`)), 10); !ok {
		return errors.New("not an integer: " + string(text))
	}
	return nil
}

// parseLocked parses a `locked` as the server writes it, without optional fields; false: it is another message.
func parseLocked(line []byte, m *locked) (ok bool) {
	rest, ok := cutPrefix(line, `{"command":"locked","payload":{"id":`)
	if ok {
		m.ID, rest, ok = parseInt(rest, `,"fence":`)
	}
	if ok {
		m.Fence, rest, ok = parseInt(rest, `,"ref":"`)
	}
	if ok {
		m.ref, ok = parseLastRef(rest)
	}
	return ok
}

// parseReleased parses a `released` with the reason `success`, as the server writes it.
func parseReleased(line []byte, m *released) (ok bool) {
	rest, ok := cutPrefix(line, `{"command":"released","payload":{"id":`)
	if ok {
		m.ID, rest, ok = parseInt(rest, `,"reason":"success","ref":"`)
	}
	if ok {
		m.Reason = reasonSuccess
		m.ref, ok = parseLastRef(rest)
	}
	return ok
}

func cutPrefix(b []byte, prefix string) (rest []byte, ok bool) {
	if len(b) < len(prefix) || string(b[:len(prefix)]) != prefix {
		return nil, false
	}
	return b[len(prefix):], true
}

// parseLastRef parses the ref at the end of a message.
func parseLastRef(b []byte) (ref uint64, ok bool) {
	n, rest, ok := parseInt(b, `"}}`)
	return uint64(n), ok && len(rest) == 0
}

// parseInt parses the digits at the beginning of b, and skips the text that must follow.
func parseInt(b []byte, after string) (n int64, rest []byte, ok bool) {
	i := 0
	for ; i < len(b) && i < 18 && b[i] >= '0' && b[i] <= '9'; i++ {
		n = n*10 + int64(b[i]-'0')
	}
	if i == 0 || len(b)-i < len(after) || string(b[i:i+len(after)]) != after {
		return 0, nil, false
	}
	return n, b[i+len(after):], true
}

// parseRef returns the number of a ref of this client; 0: it is another ref.
func parseRef(text string) uint64 {
	ref, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0
	}
	return ref
}

var payloads = map[string]func() any{
	"locked":    func() any { return &locked{} },
	"released":  func() any { return &released{} },
	"welcome":   func() any { return &welcome{} },
	"error":     func() any { return &errorReply{} },
	"watching":  func() any { return &watching{} },
	"event":     func() any { return &heldRow{} },
	"inspected": func() any { return &inspected{} },
	"queued":    func() any { return &queuedReply{} },
	"extended":  func() any { return &extendedReply{} },
	"pong":      func() any { return &pongReply{} },
	"unwatched": func() any { return &doneReply{} },
	"bye":       func() any { return &doneReply{} },
}

// parseMessage decodes any message into the payload type of its command; nil: this version does not know the command.
func parseMessage(line []byte) (any, error) {
	var message struct {
		Command string
		Payload json.RawMessage
	}
	if err := json.Unmarshal(line, &message); err != nil {
		return nil, err
	}
	newPayload := payloads[message.Command]
	if newPayload == nil {
		return nil, nil
	}
	payload := newPayload()
	if err := json.Unmarshal(message.Payload, payload); err != nil {
		return nil, err
	}
	switch m := payload.(type) {
	case *locked:
		m.ref = parseRef(m.Ref)
	case *released:
		m.ref = parseRef(m.Ref)
	}
	return payload, nil
}

func blockers(rows []blockerRow) []Blocker {
	list := make([]Blocker, len(rows))
	for i, row := range rows {
		list[i] = Blocker{row.ID, row.Resource, row.Mode, row.State, unixMS(row.Since), row.TransactionName, row.Note}
	}
	return list
}

func unixMS(ms float64) time.Time { return time.UnixMicro(int64(ms * 1000)) }

func fromMS(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
