package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

var errStaleFence = errors.New("the account was used under a newer lock")

// store is a folder with a file for each account: its balance, and the greatest fencing token with which
// it was read or written. Each read and each write is atomic; a read and a later write are not.
type store string

func (s store) create(account, balance int) error {
	return os.WriteFile(s.path(account), []byte(fmt.Sprintf("%d %d\n", balance, 0)), 0o600)
}

// read returns the balance. It also raises the stored token: from this read on, the account rejects an
// earlier clerk that paused for too long, whose write would be lost by the write that follows this read.
func (s store) read(account int, fence int64) (balance int, err error) {
	err = s.update(account, fence, func(stored int) int { balance = stored; return stored })
	return balance, err
}

func (s store) write(account, balance int, fence int64) error {
	return s.update(account, fence, func(int) int { return balance })
}

// update checks the token and changes the account in one atomic step.
func (s store) update(account int, fence int64, change func(balance int) int) error {
	file, err := os.OpenFile(s.path(account), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close() // also ends the lock of the file
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	var balance int
	var greatest int64
	if _, err := fmt.Fscan(file, &balance, &greatest); err != nil {
		return err
	}
	if fence < greatest {
		return errStaleFence
	}
	_, err = file.WriteAt([]byte(fmt.Sprintf("%-20d %-20d\n", change(balance), fence)), 0)
	return err
}

func (s store) sum() (sum int, err error) {
	for account := 0; account < accounts && err == nil; account++ {
		var file *os.File
		var balance int
		if file, err = os.Open(s.path(account)); err == nil {
			_, err = fmt.Fscan(file, &balance)
			file.Close()
			sum += balance
		}
	}
	return sum, err
}

func (s store) path(account int) string { return filepath.Join(string(s), fmt.Sprint(account)) }
