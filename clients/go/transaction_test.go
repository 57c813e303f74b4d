package genie

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func deadlock1(id, ref string) string {
	return `{"command":"released","payload":{"id":` + id + `,"reason":"deadlock","cycle":["a","b"],"waits":[],"ref":"` + ref + `"}}`
}

func resourcesOf(request received) string {
	var texts []string
	for _, resource := range request["resources"].([]any) {
		texts = append(texts, resource.(string))
	}
	return strings.Join(texts, " ")
}

func TestATransactionTakesEverythingAtOnceAfterADeadlock(t *testing.T) {
	_, p, client := connected(t, Config{})
	calls := 0
	done := start(func() (bool, error) {
		return true, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			calls++
			first, err := tx.Lock(ctx, "shared:a", "c")
			if err != nil {
				return err
			}
			if calls == 2 && (first.ID() != 20 || tx.Fence() != 120) {
				return errors.New("the lock of the first request is not used")
			}
			if _, err := tx.Lock(ctx, "b", "shared:c"); err != nil {
				return errors.Join(errors.New("wrapped"), err)
			}
			_, err = tx.Lock(ctx, "a")
			return err
		})
	})
	first := p.grant(17)
	name := first.text("transactionName")
	if second := p.grant(18); second.text("transactionName") != name || len(name) < 10 {
		t.Fatal(second)
	}
	p.send(deadlock1("19", p.expect("request").text("ref")))
	p.confirm(17)
	p.confirm(18)
	if again := p.grant(20); resourcesOf(again) != "exclusive:a exclusive:b exclusive:c" || again.text("transactionName") != name {
		t.Fatal(again)
	}
	p.confirm(20)
	if _, err := done(); err != nil || calls != 2 {
		t.Fatal(err, calls)
	}
}

func TestATransactionGivesUpAfterItsAttempts(t *testing.T) {
	_, p, client := connected(t, Config{})
	done := start(func() (bool, error) {
		return true, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			_, err := tx.Lock(ctx, "a")
			return err
		}, Attempts(2), Transaction("mine"))
	})
	for i := 0; i < 2; i++ {
		request := p.expect("request")
		if request.text("transactionName") != "mine" {
			t.Fatal(request)
		}
		p.send(deadlock1("17", request.text("ref")))
	}
	_, err := done()
	expectError(t, err, ErrDeadlock)
}

func TestATransactionThatLosesALock(t *testing.T) {
	_, p, client := connected(t, Config{})
	failure := errors.New("the work failed")
	var kept *Tx
	done := start(func() (bool, error) {
		return true, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			kept = tx
			if _, err := tx.Lock(ctx, "a"); err != nil {
				return err
			}
			p.send(released1(17, "transaction-timeout", "1"))
			<-ctx.Done()
			if !errors.Is(context.Cause(ctx), ErrTransactionTimeout) {
				return errors.New("no cause")
			}
			if _, err := tx.Lock(ctx, "b"); !errors.Is(err, ErrLockLost) {
				return errors.New("a lock is granted to a transaction that has lost one")
			}
			return failure
		})
	})
	p.grant(17)
	_, err := done()
	if expectError(t, err, ErrLockLost); !errors.Is(err, failure) {
		t.Fatal(err)
	}
	if _, err := kept.Lock(background, "a"); err == nil {
		t.Fatal("an ended transaction locks")
	}
}

func TestATransactionThatEndsWhileItWaits(t *testing.T) {
	_, p, client := connected(t, Config{})
	late := make(chan error)
	done := start(func() (bool, error) {
		return true, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			go func() {
				_, err := tx.Lock(background, "late")
				late <- err
			}()
			_, err := tx.Lock(ctx, "now")
			return err
		})
	})
	refs := map[string]string{}
	for i := 0; i < 2; i++ {
		request := p.expect("request")
		refs[resourcesOf(request)] = request.text("ref")
	}
	p.send(locked1(17, refs["exclusive:now"]))
	p.confirm(17)
	if _, err := done(); err != nil {
		t.Fatal(err)
	}
	expectError(t, <-late, ErrReleased)
	if ref := p.expect("release").text("ref"); ref != refs["exclusive:late"] {
		t.Fatal("another request was cancelled:", ref)
	}
}

func TestATransactionReleasesItsLocksIfItPanics(t *testing.T) {
	_, p, client := connected(t, Config{})
	panics := start(func() (recovered any, _ error) {
		defer func() { recovered = recover() }()
		return nil, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			_, _ = tx.Lock(ctx, "a")
			panic("x")
		})
	})
	p.grant(17)
	p.confirm(17)
	if recovered, _ := panics(); recovered != "x" {
		t.Fatal(recovered)
	}
}

func TestADeadlockIsNotRetriedAfterTheEndOfTheContext(t *testing.T) {
	_, p, client := connected(t, Config{})
	ctx, cancel := context.WithTimeout(background, time.Hour)
	done := start(func() (bool, error) {
		return true, client.Transaction(ctx, func(ctx context.Context, tx *Tx) error {
			_, err := tx.Lock(ctx, "a")
			cancel()
			return err
		})
	})
	p.send(deadlock1("17", p.expect("request").text("ref")))
	_, err := done()
	expectError(t, err, ErrDeadlock)
}

func TestUnitsAndSubtreesAsResources(t *testing.T) {
	for got, want := range map[string]string{
		Units("licences/cad", 2, 10): "2/10:licences/cad",
		Subtree("accounts/"):         "exclusive:accounts/**",
		Subtree("accounts"):          "exclusive:accounts/**",
		Subtree(""):                  "exclusive:**",
	} {
		if got != want {
			t.Error(got, want)
		}
	}
}

// After a deadlock the units of all calls are locked at once, and each call takes its part of them.
func TestATransactionLocksItsUnitsOnceAfterADeadlock(t *testing.T) {
	_, p, client := connected(t, Config{})
	calls := 0
	done := start(func() (bool, error) {
		return true, client.Transaction(background, func(ctx context.Context, tx *Tx) error {
			calls++
			for _, resources := range [][]string{{"2/10:a"}, {"1/10:a", "2/10:a"}, {"b"}} {
				if _, err := tx.Lock(ctx, resources...); err != nil {
					return err
				}
			}
			if _, err := tx.Lock(ctx, "c"); err != nil {
				return err
			}
			_, err := tx.Lock(ctx, "1/10:a")
			return err
		})
	})
	for id := 17; id < 20; id++ {
		p.grant(id)
	}
	p.send(deadlock1("20", p.expect("request").text("ref")))
	for id := 17; id < 20; id++ {
		p.confirm(id)
	}
	// The second attempt has its locks at once. What it locks at first is not asked for twice.
	if all := p.grant(21); resourcesOf(all) != "5/10:a exclusive:b exclusive:c" {
		t.Fatal(all)
	}
	if further := p.expect("request"); resourcesOf(further) != "1/10:a" {
		t.Fatal(further)
	} else {
		p.send(deadlock1("22", further.text("ref")))
	}
	p.confirm(21)
	if all := p.grant(23); resourcesOf(all) != "6/10:a exclusive:b exclusive:c" {
		t.Fatal(all)
	}
	p.confirm(23)
	if _, err := done(); err != nil || calls != 3 {
		t.Fatal(err, calls)
	}
}

func TestBlockersAndChangesWithUnits(t *testing.T) {
	blocker := Blocker{ID: 4, Resource: "a", Mode: "units", State: "held", Units: 9, Of: 10}
	if blocker.String() != "4 holds 9/10:a" {
		t.Error(blocker)
	}
	for _, pair := range []struct {
		one, other string
		conflict   bool
	}{{"units", "units", false}, {"units", "exclusive", true}, {"shared", "units", true}, {"shared", "shared", false}} {
		if (Change{ID: 1, Mode: pair.one}).conflictsWith(Change{ID: 2, Mode: pair.other}) != pair.conflict {
			t.Error(pair)
		}
	}
	for resource, isSeen := range map[string]bool{"a/b/**": true, "a/**": true, "**": true, "a/b/c": true, "a": false, "a/c/**": false} {
		if matches("a/b/", resource) != isSeen {
			t.Error(resource)
		}
	}
}
