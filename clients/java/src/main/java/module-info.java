/** The client of Genie, a lock server for distributed transactions. It has no dependencies. */
module dev.genielock {
    exports dev.genielock;
}
